"""What must survive: models, attempts and facts."""
