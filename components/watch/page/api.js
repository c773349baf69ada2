// Questions to the server. Answers are data.

export async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, one);
    }
  }
  const answer = await fetch(`/api/${path}?${query}`, { credentials: "same-origin" });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || `the server answered ${answer.status}`);
  return found;
}

export function listen(onOverview, onLost) {
  const events = new EventSource("/api/events");
  events.addEventListener("overview", (event) => onOverview(JSON.parse(event.data)));
  events.addEventListener("error", onLost);
}
