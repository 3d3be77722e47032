"""What a run writes for people: metrics, pictures, trackers."""
