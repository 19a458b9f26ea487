"""What the references of the linear ops share: the layout of quantised weights."""
