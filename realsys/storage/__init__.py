"""Files and folders that survive a crash, or are found to be incomplete. No torch."""
