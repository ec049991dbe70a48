// A button on each Python session hides the prompts on all pages until it is pressed again.
const HIDDEN = "functree-prompts-hidden";

function show(hidden) {
  document.body.classList.toggle("no-prompts", hidden);
  for (const button of document.querySelectorAll(".prompts")) {
    button.setAttribute("aria-pressed", hidden);
    button.title = hidden ? "Show prompts" : "Hide prompts";
  }
}

for (const block of document.querySelectorAll(".language-pycon.highlight")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "prompts";
  button.textContent = ">>>";
  button.addEventListener("click", () => {
    const hidden = !document.body.classList.contains("no-prompts");
    localStorage.setItem(HIDDEN, hidden);
    show(hidden);
  });
  block.append(button);
}
show(localStorage.getItem(HIDDEN) === "true");
