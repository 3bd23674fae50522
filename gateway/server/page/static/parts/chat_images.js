// Pictures of a message: chosen or pasted, shown on a canvas, and sent inside the request. No
// address of them is opened.
import { attribute, fill, h } from "../dom.js";
import { note } from "./notes.js";

// Larger ones are redrawn: models scale them down anyway.
const MOST_SIDE = 2048;
const MOST_BYTES = 4 << 20;
const SHOWN_PX = 160;
const SENT_AS_IS = ["image/png", "image/jpeg", "image/webp"];

/** A picture of a message. @param {string} url  with its data @param {string} name */
export function imageView({ url, name }) {
  const canvas = h("canvas", {
    width: "1",
    height: "1",
    role: "img",
    "aria-label": name || "picture",
  });
  bitmapOf(url).then(
    (bitmap) => draw(canvas, bitmap, SHOWN_PX),
    () => attribute(canvas, "hidden", true),
  );
  return canvas;
}

/**
 * The chooser of a message.
 * @returns {{element: any, removeAll: () => any[], paste: (event: ClipboardEvent) => void,
 *   permit: (is: boolean) => void}}
 */
export function imageChooser() {
  let chosenImages = [];
  let permitted = false;
  const input = h("input", {
    type: "file",
    id: "chat-images",
    accept: "image/*",
    multiple: true,
    hidden: true,
    change: () => add([...input.files]).then(() => (input.value = "")),
  });
  const button = h(
    "button",
    { type: "button", hidden: true, click: () => input.click() },
    "Add a picture",
  );
  const list = h("ul", { class: "row pictures" });

  async function add(files) {
    for (const file of files) {
      try {
        chosenImages.push({ name: file.name, url: await encode(file) });
      } catch {
        note(`${file.name} is not a picture that this browser can read.`, true);
      }
    }
    show();
  }

  function show() {
    fill(
      list,
      chosenImages.map((image) =>
        h(
          "li",
          {},
          imageView(image),
          h(
            "button",
            {
              type: "button",
              class: "quiet",
              "aria-label": `Remove ${image.name}`,
              click: () => {
                chosenImages = chosenImages.filter((picture) => picture !== image);
                show();
              },
            },
            "✕",
          ),
        ),
      ),
    );
  }

  return {
    element: h("div", { class: "row" }, button, input, list),
    permit(is) {
      permitted = is;
      attribute(button, "hidden", !is);
    },
    paste(event) {
      const files = [...(event.clipboardData?.files ?? [])].filter((file) =>
        file.type.startsWith("image/"),
      );
      // Programs for texts and tables add a picture of the words.
      if (!permitted || !files.length || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      add(files);
    },
    set(images) {
      chosenImages = [...images];
      show();
    },
    /** Removes all images, and returns them. */
    removeAll() {
      const batch = chosenImages;
      chosenImages = [];
      show();
      return batch;
    },
  };
}

/** The file as an address with its data. */
async function encode(file) {
  const bitmap = await createImageBitmap(file);
  const isSmall = Math.max(bitmap.width, bitmap.height) <= MOST_SIDE && file.size <= MOST_BYTES;
  if (isSmall && SENT_AS_IS.includes(file.type))
    return `data:${file.type};base64,${base64(new Uint8Array(await file.arrayBuffer()))}`;
  const canvas = document.createElement("canvas");
  draw(canvas, bitmap, MOST_SIDE, "white");
  return canvas.toDataURL("image/jpeg", 0.9);
}

function base64(data) {
  let text = "";
  for (let at = 0; at < data.length; at += 0x8000)
    text += String.fromCharCode(...data.subarray(at, at + 0x8000));
  return btoa(text);
}

async function bitmapOf(url) {
  const [head, data] = url.split(",");
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  return createImageBitmap(new Blob([bytes], { type: head.slice(5).split(";")[0] }));
}

/** `ground`: the colour behind transparent parts, which JPEG makes black. */
function draw(canvas, bitmap, most, ground = "transparent") {
  const scale = Math.min(1, most / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = ground;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
}
