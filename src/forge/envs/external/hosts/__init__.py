"""Programs that run in the Python of another project, one process for each episode; they import nothing of ours."""
