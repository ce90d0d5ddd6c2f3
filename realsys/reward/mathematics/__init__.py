"""Mathematical answers as texts and values, for the verifier ``math``: all functions are pure."""
