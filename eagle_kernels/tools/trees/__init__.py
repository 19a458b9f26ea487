"""Recording and drawing the trees that steps verify."""
