// Search where the pages are opened as files. Browsers start no Worker for them, so the worker's
// script runs in a hidden frame of the page, which has the page's origin. Its name is the one that
// Material's plugin `offline` looks for before it adds a script from elsewhere.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html><title>search</title>";
      this.started = new Promise((resolve, reject) => {
        this.frame.addEventListener("load", () => resolve(this.start(url, reject)), { once: true });
      });
      document.body.append(this.frame);
    }

    // Load the script in the frame; a promise of the frame's window.
    start(url, reject) {
      const inside = this.frame.contentWindow;
      // what the script posts is for the page, not for its own window
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = new URL(url, document.baseURI);
      return new Promise((resolve) => {
        script.onload = () => resolve(inside);
        script.onerror = () => reject(new Error(`${script.src} is not there`));
        inside.document.head.append(script);
      });
    }

    postMessage(data) {
      this.started.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
