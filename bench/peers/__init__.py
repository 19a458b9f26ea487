"""Other projects' implementations as providers; one that is not installed says so in one line and is left out."""

from pathlib import Path

# where the files of the peers that are no installed packages lie
FOLDER = Path(__file__).parent.parent.parent / ".peers"
