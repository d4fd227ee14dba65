"""Planning by simulation: predicts step time and memory of a recipe on a cluster and searches for the best options."""
