"""Where drafts come from: a drafter for each method, behind one protocol."""
