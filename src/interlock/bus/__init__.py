"""The command bus: signed commands from one service to another, the rules that they pass, and what is told of them."""
