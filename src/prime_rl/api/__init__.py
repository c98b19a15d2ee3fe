"""The Python API: runs the commands as processes of the calling program, and follows them through their files."""
