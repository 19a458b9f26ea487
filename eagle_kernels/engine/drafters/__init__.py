"""Where drafts come from: a file for each method, behind one protocol."""
