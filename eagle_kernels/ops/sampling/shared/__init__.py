"""What ops of this family share: noise, filters, logits as they are sampled from, and the steps of the renorms."""
