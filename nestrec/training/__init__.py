"""Training: the trainer, its run folder, checkpoints, callbacks, warm start, online training, and recipes."""
