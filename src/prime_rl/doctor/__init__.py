"""`doctor`: what a run does, who waits for whom, and what is wrong with it, told from its directory alone."""
