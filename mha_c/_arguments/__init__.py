"""What users give, as the core takes it."""
