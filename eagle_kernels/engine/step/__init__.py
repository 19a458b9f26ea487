"""One step of a batch: how it is planned, chosen, captured and timed, and how its drafts are verified."""
