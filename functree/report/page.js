// This script adds the search, and buttons that expand or collapse the whole tree. Without it, the
// page can still be read and folded.
(() => {
  const root = document.currentScript.closest(".functree");
  const tools = root.querySelector(".tools");
  const box = tools.querySelector("input");
  const found = tools.querySelector("output");
  const leaves = [...root.querySelectorAll(".leaf")];
  const nodes = [...root.querySelectorAll(".tree details")];
  const texts = leaves.map((leaf) => `${leaf.dataset.path} ${leaf.textContent}`.toLowerCase());
  let before = null; // what was open before the search

  const search = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length && !before) before = nodes.map((node) => node.open);
    let number = 0;
    leaves.forEach((leaf, i) => {
      leaf.hidden = !words.every((word) => texts[i].includes(word));
      number += !leaf.hidden;
    });
    nodes.forEach((node, i) => {
      node.hidden = words.length > 0 && !node.querySelector(".leaf:not([hidden])");
      if (words.length) node.open = !node.hidden;
      else if (before) node.open = before[i];
    });
    if (!words.length) before = null;
    found.textContent = words.length ? `${number} of ${leaves.length}` : "";
  };
  const fold = (open) => nodes.forEach((node) => (node.open = open));

  tools.hidden = false;
  tools.querySelectorAll("button").forEach((button) => (button.hidden = !nodes.length));
  box.addEventListener("input", search);
  tools.querySelector(".unfold").addEventListener("click", () => fold(true));
  tools.querySelector(".fold").addEventListener("click", () => fold(false));
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== box) {
      event.preventDefault();
      box.focus();
    } else if (event.key === "Escape" && document.activeElement === box) {
      box.value = "";
      search();
    }
  });
})();
