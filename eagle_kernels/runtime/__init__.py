"""L0, facts about the host: argument checks, target questions, tuning rows, launches, operator registration."""
