"""What `interlock up` does: servers, listeners and child processes of one folder, kept alive and drained in order."""
