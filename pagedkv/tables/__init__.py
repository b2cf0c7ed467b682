"""Where each token lies: block tables, their device side, and the commit that joins the two."""
