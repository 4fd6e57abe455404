// "Which block?" of the front page: three questions, then a file and a command to copy.
// blocks.js, made by scripts/make_docs.py, has the answers.
(function () {
  const place = document.getElementById("chooser");
  if (!place) return;
  const made = hybridcompBlocks, chosen = {};
  const ask = document.createElement("div"), answer = document.createElement("div");
  answer.setAttribute("aria-live", "polite");
  place.replaceChildren(ask, answer);

  function question(name, title, options) {
    const group = document.createElement("fieldset");
    group.innerHTML = "<legend></legend>";
    group.firstChild.textContent = title;
    for (const option of options) {
      const label = document.createElement("label"), input = document.createElement("input");
      Object.assign(input, { type: "radio", name, value: option, checked: chosen[name] === option });
      input.addEventListener("change", () => { chosen[name] = option; draw(name); });
      label.append(input, option);
      group.append(label);
    }
    return group;
  }

  function copied(title, text) {
    const box = document.createElement("div"), head = document.createElement("p");
    const button = document.createElement("button"), code = document.createElement("pre");
    head.textContent = title;
    button.textContent = "Copy";
    button.className = "md-button";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    });
    code.append(Object.assign(document.createElement("code"), { textContent: text }));
    head.append(button);
    box.append(head, code);
    return box;
  }

  function draw(changed) {
    const engine = made.engines[chosen.engine], stages = engine ? engine.stages : [];
    if (!stages.includes(chosen.stage)) chosen.stage = stages.length === 1 ? stages[0] : undefined;
    if (changed !== "link" && changed !== "stage") {
      ask.replaceChildren(
        question("engine", "Engine", Object.keys(made.engines)),
        question("link", "Link between the ranks", made.links),
        ...(stages.length > 1 ? [question("stage", "Stage", stages)] : []),
      );
      const input = changed && ask.querySelector("input:checked");
      if (input) input.focus();
    }
    answer.replaceChildren();
    if (!engine || !chosen.link || !chosen.stage) return;
    const found = made.blocks[[chosen.engine, chosen.link, chosen.stage].join("|")];
    const more = Object.assign(document.createElement("a"), { href: engine.page, textContent: "More on this engine" });
    if (found) {
      answer.append(copied(found[0], JSON.stringify(found[1], null, 2)), copied("Start", engine.command), more);
    } else {
      answer.append("On one machine native messages are as fast: no block is needed.");
    }
  }
  draw();
})();
