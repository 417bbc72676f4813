"""What a trained chess network says, and how good it is."""
