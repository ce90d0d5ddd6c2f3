"""Use of time in a trial: reads the spans of all processes and the step log. It changes no trial."""
