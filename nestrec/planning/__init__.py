"""What a cluster would do: schedules replayed over costs, plans searched, clusters described."""
