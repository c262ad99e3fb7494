"""What several projects of the help desk share."""
