"""Similarity of a completion to the reversed text: pure functions of two strings, from 0 to 1."""

from collections import Counter


def lcs_length(a: str, b: str) -> int:
    """Return the length of the longest common subsequence of `a` and `b`, in O(len(a) * len(b))."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            above = row[j]
            row[j] = diagonal + 1 if x == y else max(above, row[j - 1])
            diagonal = above
    return row[-1]


def lcs_ratio(answer: str, completion: str) -> float:
    """Return 2 * lcs / (len(answer) + len(completion)): 1 if equal, 0 if no character is common."""
    total = len(answer) + len(completion)
    return 2 * lcs_length(answer, completion) / total if total else 1.0


def letter_overlap(answer: str, completion: str) -> float:
    """Return the same ratio with order forgotten: what of `lcs_ratio` copying the right letters could bring at most."""
    total = len(answer) + len(completion)
    common = (Counter(answer) & Counter(completion)).total()
    return 2 * common / total if total else 1.0


def exact_match(answer: str, completion: str) -> float:
    """Return 1 if the completion is the answer, else 0."""
    return float(answer == completion)


def length_match(answer: str, completion: str) -> float:
    """Return 1 if the completion is as long as the answer, else 0."""
    return float(len(answer) == len(completion))
