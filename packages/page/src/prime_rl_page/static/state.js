// All state of the page is in the fragment of its URL: #view=rollouts&run=a&step=3

const listeners = [];

export function readState() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

export function stateUrl(changes, keep = true) {
  const state = keep ? readState() : {};
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") delete state[name];
    else state[name] = String(value);
  }
  return `#${new URLSearchParams(state)}`;
}

export function setState(changes, { replace = false, keep = true } = {}) {
  const url = stateUrl(changes, keep);
  if (url === location.hash) return;
  if (replace) history.replaceState(null, "", url);
  else history.pushState(null, "", url);
  for (const listener of listeners) listener();
}

export function onState(listener) {
  listeners.push(listener);
  addEventListener("popstate", listener);
}
