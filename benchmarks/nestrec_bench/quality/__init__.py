"""Quality of finished runs, and the speed of preparation."""
