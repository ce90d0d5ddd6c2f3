"""Code that runs inside of the sandbox. Standard library only: nothing else of realsys is visible there."""
