"""Running the processes of a run on several nodes, over ssh or srun."""
