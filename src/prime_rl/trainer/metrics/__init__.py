"""Statistics over tokens, parameters and ranks, for the metrics of a step."""
