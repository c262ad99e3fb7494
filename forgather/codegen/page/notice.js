// A word about what is shown, above it: `say` shows one, the next replaces it.

const notice = byId("notice");

/** Shows a text with what may follow it; nothing hides the notice. */
function say(...parts) {
  notice.hidden = !parts.length;
  notice.replaceChildren();
  if (parts.length) notice.append(make("span", "", ...parts), button("close", "×", "close", () => say()));
}

/** Says that an address leads nowhere, and where it would lead with a letter or two changed. */
function sayUnknown(path, go) {
  const near = nearestPath(path);
  const link = near && button("link", cut(pathOf(near), 120), "", () => {
    say();
    go(near);
  });
  say("There is no ", make("code", "", cut(path, 120)), " in this config.", ...(link ? [" The nearest is ", link, "."] : []));
}
