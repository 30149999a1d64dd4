"""Who the ranks are, and how they talk to each other, agree and fail."""
