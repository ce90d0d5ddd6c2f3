"""What a run does, for people: timeline of its processes, samples, status page."""
