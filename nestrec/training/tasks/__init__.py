"""What can be learned: one small file a task."""
