"""`leeway studio`: a config made on a page. The form is the schema, the verdict is that of `leeway validate`."""
