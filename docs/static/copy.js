// A button on each block that can be copied: of a block with prompts ("$ ", "# ") the commands alone. Output has none.
const PROMPTED = /^[$#] ((?:.*[\\|]\n)*.*)$/gm;
const MIXED = ".highlight-text, .highlight-console"; // commands with what they print

function copied(block) {
  const text = block.querySelector("pre").textContent.trimEnd();
  if (!block.matches(MIXED)) return text;
  return [...text.matchAll(PROMPTED)].map((found) => found[1]).join("\n");
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // A page that came over plain HTTP has no clipboard.
  const area = document.body.appendChild(document.createElement("textarea"));
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
}

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div[class*=highlight-]")) {
    const text = copied(block);
    if (!text) continue;
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await copy(text);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
});
