"""Which of somebody's own lines makes the difference, and what it should be: a call noted operation by operation."""
