"""Training data: captioned scenes composed from drawings, or a user's own pictures, and their token cache."""
