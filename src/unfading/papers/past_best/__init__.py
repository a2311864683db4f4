"""Our own settings for the best published results of the leaderboard's tasks."""
