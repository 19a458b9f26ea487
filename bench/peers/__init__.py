"""Other projects' implementations as providers; one that is not installed says so in one line and is left out."""
