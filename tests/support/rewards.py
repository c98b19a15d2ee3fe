"""Reward functions for `env.rewards`."""


def is_long(text, least):
    return float(len(text) >= least)


def of_column(completion, answer):
    return float(answer) + len(completion)


def fails(prompt):
    raise ValueError(f"cannot score {len(prompt)} messages")


def of_state(state):
    return 0.0
