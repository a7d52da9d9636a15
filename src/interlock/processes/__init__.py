"""Operating-system processes: background loops, supervision of children, Landlock, seccomp."""
