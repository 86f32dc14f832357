"""`check`: what somebody's attention computes beside the book's, and which known mistakes explain the difference."""
