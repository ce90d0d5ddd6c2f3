"""What the trainer and the interpreters of the engines both import: these have no realsys, only this folder."""
