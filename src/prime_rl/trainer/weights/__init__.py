"""Loading and initialisation of the weights of a policy."""
