// Copies the token after "#" in the printed address into the form.
"use strict";
const token = new URLSearchParams(location.hash.slice(1)).get("token");
if (token) {
  history.replaceState(null, "", location.pathname);
  const form = document.getElementById("sign-in");
  form.elements.token.value = token;
  if ("atOnce" in form.dataset) form.submit();
}
