"""Any task of reasoning-gym."""

from reasoning_gym_tasks.environment import load_environment

__all__ = ["load_environment"]
