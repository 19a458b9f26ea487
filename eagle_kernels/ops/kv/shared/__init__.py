"""What ops of this family share: rows of req_to_token."""
