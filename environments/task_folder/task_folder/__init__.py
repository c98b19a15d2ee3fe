"""Tasks from a folder, for agents with files and a shell: a v1 taskset of verifiers."""

from task_folder.taskset import FolderTaskset

__all__ = ["FolderTaskset"]
