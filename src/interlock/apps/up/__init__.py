"""The supervisor behind `interlock up`: starts, restarts and drains the servers and child processes of one folder."""
